-- Makes those of the ids that this lease still holds pending again. The delivery is not counted, so a high count means
-- deliveries without a result.
-- KEYS heads line
-- ARGV wake token [score id ...]
-- RETURN number of entries released

--- include score
--- include head
--- include wake

-- First a removal, so that it works at maxmemory (see reserve).
redis.call('ZREM', KEYS[1], '%')
local token = tonumber(ARGV[2])
local head = waiting_head(KEYS[2])
local ids, moves = {}, {}
for i = 4, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local scores = redis.call('ZMSCORE', KEYS[2], unpack(ids))
for i = 1, #ids do
  local score = tonumber(scores[i] or -1)
  if score >= token and score < token + DELIVERIES then
    local deliveries = math.max(score - token - 1, 0)
    moves[#moves + 1], moves[#moves + 2] = text(tonumber(ARGV[2 * i + 1]) + deliveries), ids[i]
  end
end
if #moves == 0 then
  return 0
end
local released = redis.call('ZADD', KEYS[2], 'XX', 'CH', unpack(moves))
set_head(KEYS[1], KEYS[2])
wake_if_earlier(KEYS[2], ARGV[1], head)
return released

-- Removes those of the ids that this lease still holds.
-- KEYS heads line
-- ARGV token [id ...]
-- RETURN number of entries removed

--- include score
--- include head

-- Read first, so that foreign heads stop the command before it has changed anything.
redis.call('ZCARD', KEYS[1])
local token = tonumber(ARGV[1])
local scores = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 2))
local held = {}
for i = 1, #scores do
  local score = tonumber(scores[i] or -1)
  if score >= token and score < token + DELIVERIES then
    held[#held + 1] = ARGV[i + 1]
  end
end
if #held == 0 then
  return 0
end
local removed = redis.call('ZREM', KEYS[2], unpack(held))
set_head(KEYS[1], KEYS[2])
return removed

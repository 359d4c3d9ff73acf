-- Moves all entries that this lease still holds to a new one that ends lease_ms from now.
-- KEYS heads counter line
-- ARGV token lease_ms
-- RETURN {new token or -1, number of entries moved}

--- include score
--- include clock
--- include head
--- include token

-- First a removal, so that it works at maxmemory (see reserve).
redis.call('ZREM', KEYS[1], '%')
local old = tonumber(ARGV[1])
local range = {text(old), text(old + DELIVERIES - 1)}
local held = redis.call('ZRANGEBYSCORE', KEYS[3], range[1], range[2], 'WITHSCORES', 'LIMIT', 0, 1000)
if #held == 0 then
  return {-1, 0}
end
local new = new_token(KEYS[3], KEYS[2], now_ms() + tonumber(ARGV[2]))
local moves = {}
-- The brackets keep every number below 2^53, above which a double skips integers.
for i = 1, #held, 2 do
  moves[i], moves[i + 1] = text(new + (held[i + 1] - old)), held[i]
end
redis.call('ZADD', KEYS[3], 'XX', unpack(moves))
set_head(KEYS[1], KEYS[3])
return {new, #held / 2}

-- Removes all entries that this lease still holds: by rank, so that a forged range does not make it slow.
-- KEYS entries
-- ARGV token
-- RETURN number of entries removed

--- include score

local token = tonumber(ARGV[1])
local held = redis.call('ZCOUNT', KEYS[1], text(token), text(token + DELIVERIES - 1))
if held == 0 then
  return 0
end
local first = redis.call('ZCOUNT', KEYS[1], '-inf', '(' .. text(token))
return redis.call('ZREMRANGEBYRANK', KEYS[1], first, first + math.min(held, 1000) - 1)

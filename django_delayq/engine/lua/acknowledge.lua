-- Removes those of the ids that this lease still holds.
-- KEYS entries
-- ARGV token [id ...]
-- RETURN number of entries removed

--- include score

local token = tonumber(ARGV[1])
local scores = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 2))
local held = {}
for i = 1, #scores do
  local score = tonumber(scores[i] or -1)
  if score >= token and score < token + DELIVERIES then
    held[#held + 1] = ARGV[i + 1]
  end
end
return #held > 0 and redis.call('ZREM', KEYS[1], unpack(held)) or 0

-- Removes entries, pending or leased.
-- KEYS heads line
-- ARGV [id ...]
-- RETURN number of entries removed

--- include score
--- include head

-- Read first, so that foreign heads stop the command before it has changed anything.
redis.call('ZCARD', KEYS[1])
local removed = redis.call('ZREM', KEYS[2], unpack(ARGV))
set_head(KEYS[1], KEYS[2])
return removed

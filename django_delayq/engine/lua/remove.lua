-- Removes entries, pending or leased.
-- KEYS heads line
-- ARGV [id ...]
-- RETURN number of entries removed

--- include score
--- include head

-- First a removal, so that it works at maxmemory (see reserve).
redis.call('ZREM', KEYS[1], '%')
local removed = redis.call('ZREM', KEYS[2], unpack(ARGV))
set_head(KEYS[1], KEYS[2])
return removed

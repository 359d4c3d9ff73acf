-- Removes entries, pending or leased.
-- KEYS entries
-- ARGV [id ...]
-- RETURN number of entries removed

return redis.call('ZREM', KEYS[1], unpack(ARGV))

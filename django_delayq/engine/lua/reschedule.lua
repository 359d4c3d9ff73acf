-- Sets due times: adds entries, moves them in both directions, and ends leases, as a new deadline makes the current
-- delivery useless. The count of deliveries begins again.
-- KEYS heads line
-- ARGV wake last_ms [score id ...]
-- RETURN number of entries added or changed

--- include score
--- include clock
--- include head
--- include keep
--- include wake

-- Read first, so that foreign heads stop the command before it has changed anything.
redis.call('ZCARD', KEYS[1])
local head = waiting_head(KEYS[2])
local changed = redis.call('ZADD', KEYS[2], 'CH', unpack(ARGV, 3))
set_head(KEYS[1], KEYS[2])
keep(KEYS, tonumber(ARGV[2]))
wake_if_earlier(KEYS[2], ARGV[1], head)
return changed

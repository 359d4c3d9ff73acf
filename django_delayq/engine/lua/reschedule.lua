-- Sets due times: adds entries, moves them in both directions, and ends leases, as a new deadline makes the current
-- delivery useless. The count of deliveries begins again.
-- KEYS entries
-- ARGV wake [score id ...]
-- RETURN number of entries added or changed

--- include score
--- include head
--- include wake

local head = waiting_head(KEYS[1])
local changed = redis.call('ZADD', KEYS[1], 'CH', unpack(ARGV, 2))
wake_if_earlier(KEYS[1], ARGV[1], head)
return changed

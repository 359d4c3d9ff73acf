-- Counts the entries by three look-ups by score, independent of their number.
-- KEYS entries
-- ARGV
-- RETURN {total, under a live lease, due, next ms or -1, now ms}

--- include score
--- include clock
--- include head

local now = now_ms()
local due = now * MS + MS - 1
local waiting = redis.call('ZCOUNT', KEYS[1], '-inf', text(due))
local lapsed = redis.call('ZCOUNT', KEYS[1], text(LEASED), text(LEASED + due))
local leased = redis.call('ZCOUNT', KEYS[1], '(' .. text(LEASED + due), '(' .. text(BEYOND))
return {redis.call('ZCARD', KEYS[1]), leased, waiting + lapsed, next_ms(KEYS[1]) or -1, now}

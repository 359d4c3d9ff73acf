-- Leases due entries of lines to the caller: of each expired leases first (they were due before), then pending entries,
-- earliest first, also those that fall due within ahead_ms; then those whose lease ends later than any may (ensure).
-- Invalid members are removed. Changes at most 1000 members in all; call it again for more. Sets the head of each line,
-- which is all that it does with a limit of 0.
-- KEYS heads counter [line ...]
-- ARGV lease_ms ahead_ms max_lease_ms heads_ms [limit ...] [name ...]
-- RETURN {now ms, number discarded, heads, {{token or -1, {id ...}, {deliveries ...}} of each line}}
-- heads: the head or nil of each name, however many others there are; without names {name, ms, name, ms ...}

--- include score
--- include clock
--- include head
--- include token
--- include names
--- include ids
--- include lease

-- First a removal of what is never there: at maxmemory Redis refuses a script's ZADD unless the script has already
-- freed memory. Without it a full Redis would stay full.
redis.call('ZREM', KEYS[1], '%')
local now, reserved = now_ms(), {}
for i = 3, #KEYS do
  reserved[i - 2] = lease_due(KEYS[i], tonumber(ARGV[i + 2]), now)
  set_head(KEYS[1], KEYS[i])
end
local asked = {unpack(ARGV, #KEYS + 3)}
local heads = asked[1] and redis.call('ZMSCORE', KEYS[1], unpack(asked))
return {now, discarded, heads or names_until(KEYS[1], text(now + tonumber(ARGV[4]))), reserved}

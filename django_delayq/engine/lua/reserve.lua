-- Leases due entries of lines to the caller: of each expired leases first (they were due before), then pending entries,
-- earliest first, also those that fall due within ahead_ms; then those whose lease ends later than any may (ensure).
-- Invalid members are removed. Changes at most 1000 members in all; call it again for more. Sets the head of each line,
-- which is all that it does with a limit of 0.
-- KEYS heads counter [line ...]
-- ARGV lease_ms ahead_ms max_lease_ms heads_ms [limit ...]
-- RETURN {now ms, number discarded, {name, ms, name, ms ...}, {{token or -1, {id ...}, {deliveries ...}} of each line}}

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
return {now, discarded, names_until(KEYS[1], text(now + tonumber(ARGV[4]))), reserved}

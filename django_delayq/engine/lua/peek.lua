-- Returns up to `limit` pending and as many leased entries, each kind earliest first. Changes nothing.
-- KEYS line
-- ARGV limit
-- RETURN {id, ms, id, ms ...}: the due time or the lease's expiry

--- include score
--- include ids

local shown = {}
local function show(low, high)
  local limit = math.min(tonumber(ARGV[1]), 500)
  local found = redis.call('ZRANGEBYSCORE', KEYS[1], low, high, 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #found, 2 do
    if is_id(found[i]) then
      shown[#shown + 1], shown[#shown + 2] = found[i], ms_of(tonumber(found[i + 1]))
    end
  end
end
show('0', '(' .. text(LEASED))
show(text(LEASED), '(' .. text(BEYOND))
return shown

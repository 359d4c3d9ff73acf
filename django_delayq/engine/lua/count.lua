-- Adds to a counter of the last slices, and returns what it has counted in the present slice and the complete ones
-- before it. A string of slice:count pairs, because it needs no command that the others do not need.
-- KEYS counter
-- ARGV amount slice_ms slices
-- RETURN number counted

--- include clock

local slice_ms, slices = tonumber(ARGV[2]), tonumber(ARGV[3])
local present = math.floor(now_ms() / slice_ms)
local own, total, kept = tonumber(ARGV[1]), 0, {}
for slice, count in string.gmatch(redis.call('GET', KEYS[1]) or '', '(%d+):(%d+)') do
  local age = present - tonumber(slice)
  if age == 0 then
    own = own + tonumber(count)
  elseif age > 0 and age < slices then
    kept[#kept + 1] = slice .. ':' .. count
    total = total + tonumber(count)
  end
end
kept[#kept + 1] = string.format('%.0f:%.0f', present, own)
redis.call('SET', KEYS[1], table.concat(kept, ' '), 'PX', string.format('%.0f', slice_ms * slices))
return total + own

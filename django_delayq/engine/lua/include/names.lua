-- The lines whose next work is at most at `high`, the earliest first: {name, ms, name, ms ...}. A name is what this
-- library writes: quoted, and never so long that a thousand of them would make a large reply. Others are removed.
local function names_until(heads, high)
  local found = redis.call('ZRANGEBYSCORE', heads, '-inf', high, 'WITHSCORES', 'LIMIT', 0, 1000)
  local names, junk = {}, {}
  for i = 1, #found, 2 do
    if #found[i] > 3000 or string.find(found[i], '[^%w_.~%%-]') then
      junk[#junk + 1] = found[i]
    else
      names[#names + 1], names[#names + 2] = found[i], text(math.max(tonumber(found[i + 1]), 0))
    end
  end
  if #junk > 0 then
    redis.call('ZREM', heads, unpack(junk))
  end
  return names
end

-- The score of the earliest pending entry, and the ms when the next entry becomes due or its lease expires; or nil.
local function first_score(entries, low, high)
  local found = redis.call('ZRANGEBYSCORE', entries, low, high, 'WITHSCORES', 'LIMIT', 0, 1)
  return found[2] and tonumber(found[2])
end

local function waiting_head(entries)
  return first_score(entries, '0', '(' .. text(LEASED))
end

local function next_ms(entries)
  local waiting = waiting_head(entries)
  local leased = first_score(entries, text(LEASED), '(' .. text(BEYOND))
  if waiting and leased then
    return math.min(ms_of(waiting), ms_of(leased))
  end
  local only = waiting or leased
  return only and ms_of(only)
end

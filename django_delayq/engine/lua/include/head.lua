-- The score of a line's earliest pending entry; the ms when the next entry becomes due or its lease expires; and the
-- head that states it. Every command that changes a line sets its head, so no line with due entries stays unasked.
local function first_score(line, low, high)
  local found = redis.call('ZRANGEBYSCORE', line, low, high, 'WITHSCORES', 'LIMIT', 0, 1)
  return found[2] and tonumber(found[2])
end

local function waiting_head(line)
  return first_score(line, '0', '(' .. text(LEASED))
end

local function next_ms(line)
  local waiting = waiting_head(line)
  local leased = first_score(line, text(LEASED), '(' .. text(BEYOND))
  if waiting and leased then
    return math.min(ms_of(waiting), ms_of(leased))
  end
  local only = waiting or leased
  return only and ms_of(only)
end

-- The key of the heads and that of a line are equal up to ":h" and ":l:<name>".
local function set_head(heads, line)
  local ms, name = next_ms(line), string.sub(line, #heads + 2)
  if ms then
    redis.call('ZADD', heads, text(ms), name)
  else
    redis.call('ZREM', heads, name)
  end
end

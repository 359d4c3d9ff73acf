-- Keeps a line and its heads for a day after its last entry is due, at least, because a lease lasts a day at most. So a
-- line that no process declares any more ends by itself. Renewed a day ahead, because every renewal is also sent to
-- replicas and to the append-only file.
local DAY = 86400000

local function keep(keys, last_ms)
  local needed = math.max(last_ms - now_ms(), 0) + DAY
  for _, key in ipairs(keys) do
    if redis.call('PTTL', key) < needed then
      redis.call('PEXPIRE', key, text(needed + DAY))
    end
  end
end

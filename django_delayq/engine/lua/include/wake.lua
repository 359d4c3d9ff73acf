-- Tells waiting workers when the earliest due time moved forward. pcall: the wake-up is a hint, and a user who may
-- not publish must not make a command fail whose writes are done.
local function wake_if_earlier(entries, channel, before)
  local after = waiting_head(entries)
  if after and (not before or ms_of(after) < ms_of(before)) then
    redis.pcall('PUBLISH', channel, text(ms_of(after)))
  end
end

-- Tells waiting workers when the earliest due time moved forward. pcall: the wake-up is a hint, and a user who may
-- not publish must not make a command fail whose writes are done. The channel comes as an argument: among the keys a
-- cluster would take it for one that has moved already, and refuse the command for as long as the slot is on its way.
local function wake_if_earlier(entries, channel, before)
  local after = waiting_head(entries)
  if after and (not before or ms_of(after) < ms_of(before)) then
    redis.pcall('PUBLISH', channel, text(ms_of(after)))
  end
end

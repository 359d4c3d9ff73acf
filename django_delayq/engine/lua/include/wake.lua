-- Wakes waiting workers when the earliest due time of a line moved forward: of the line, because the one of the queue
-- may be that of a line which no worker may fire now. pcall: the wake-up is a hint, and the writes of the command are
-- done, so a user that may not publish must not make it fail. The channel is an argument: among the keys a cluster
-- would treat it as one that has moved already, and refuse the command while the slot is being moved.
local function wake_if_earlier(line, channel, before)
  local after = waiting_head(line)
  if after and (not before or ms_of(after) < ms_of(before)) then
    redis.pcall('PUBLISH', channel, text(ms_of(after)))
  end
end

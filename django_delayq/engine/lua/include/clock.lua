-- Only the server's clock is used: a worker whose own clock is wrong still waits and fires correctly.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

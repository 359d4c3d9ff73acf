-- The server's clock is the only one: a worker whose own clock is wrong still sleeps and fires right.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

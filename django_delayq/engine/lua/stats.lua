-- Counts the entries of lines by three look-ups by score for each, independent of their number.
-- KEYS [line ...]
-- ARGV
-- RETURN {total, under a live lease, due, next ms or -1, now ms}

--- include score
--- include clock
--- include head

local now = now_ms()
local till = now * MS + MS - 1
local total, leased, due, next = 0, 0, 0, -1
for _, line in ipairs(KEYS) do
  local waiting = redis.call('ZCOUNT', line, '-inf', text(till))
  local lapsed = redis.call('ZCOUNT', line, text(LEASED), text(LEASED + till))
  total, due = total + redis.call('ZCARD', line), due + waiting + lapsed
  leased = leased + redis.call('ZCOUNT', line, '(' .. text(LEASED + till), '(' .. text(BEYOND))
  local ms = next_ms(line)
  if ms and (next < 0 or ms < next) then
    next = ms
  end
end
return {total, leased, due, next, now}

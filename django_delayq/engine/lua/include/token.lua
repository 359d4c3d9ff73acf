-- A lease's token is its score without deliveries, so all entries of a line leased by one reserve are in
-- [token, token + 15], and no others: seq distinguishes the leases that end in one millisecond, and a range still in
-- use is skipped.
local function new_token(line, counter, expiry_ms)
  local last = redis.call('GET', counter)
  last = last and string.find(last, '^%d%d?$') and tonumber(last) or 0
  for step = 1, 640 do
    local seq = (last + step) % 64
    local token = LEASED + (expiry_ms + math.floor((step - 1) / 64)) * MS + seq * DELIVERIES
    if redis.call('ZCOUNT', line, text(token), text(token + DELIVERIES - 1)) == 0 then
      redis.call('SET', counter, text(seq))
      return token
    end
  end
  error('640 leases end within ten milliseconds')
end

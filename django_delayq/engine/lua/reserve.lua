-- Leases due entries to the caller: expired leases first (they were due before), then pending entries, earliest first,
-- also those that fall due within ahead_ms; then those whose lease ends later than any may (see ensure).
-- Invalid members are removed. Changes at most 1000 members; call it again for more.
-- KEYS entries counter
-- ARGV limit lease_ms ahead_ms max_lease_ms
-- RETURN {now ms, next ms or -1, token or -1, number discarded, {id ...}, {deliveries ...}}

--- include score
--- include clock
--- include head
--- include token
--- include ids

-- First a removal: at maxmemory Redis refuses a script's ZADD unless the script has already freed memory. Without it
-- a full Redis would stay full.
local discarded = redis.call('ZREM', KEYS[1], '')
local now = now_ms()
local limit = math.min(tonumber(ARGV[1]), 1000)
local budget = 1000
local ids, deliveries, token = {}, {}, nil

local function discard(members)
  if #members > 0 then
    discarded = discarded + redis.call('ZREM', KEYS[1], unpack(members))
  end
end

local function lease(low, high)
  local junk
  repeat
    local room = math.min(limit - #ids, budget)
    local found = redis.call('ZRANGEBYSCORE', KEYS[1], low, text(high), 'WITHSCORES', 'LIMIT', 0, room)
    local moves = {}
    junk = {}
    for i = 1, #found, 2 do
      local id, score = found[i], tonumber(found[i + 1])
      if is_id(id) and ours(score) then
        token = token or new_token(KEYS[1], KEYS[2], now + tonumber(ARGV[2]))
        local delivery = math.min(score % DELIVERIES + 1, DELIVERIES - 1)
        ids[#ids + 1], deliveries[#ids + 1] = id, delivery
        moves[#moves + 1], moves[#moves + 2] = text(token + delivery), id
      else
        junk[#junk + 1] = id
      end
    end
    if #moves > 0 then
      redis.call('ZADD', KEYS[1], 'XX', unpack(moves))
    end
    discard(junk)
    budget = budget - #found / 2
  until #junk == 0 or #ids == limit or budget == 0
end

lease(text(LEASED), LEASED + now * MS + MS - 1)
lease('-inf', (now + tonumber(ARGV[3])) * MS + MS - 1)
lease(text(LEASED + (now + tonumber(ARGV[4])) * MS + MS), BEYOND - 1)
discard(redis.call('ZRANGEBYSCORE', KEYS[1], text(BEYOND), '+inf', 'LIMIT', 0, budget))

return {now, next_ms(KEYS[1]) or -1, token or -1, discarded, ids, deliveries}

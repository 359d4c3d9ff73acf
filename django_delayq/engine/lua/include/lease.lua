-- Leases due entries of one line, see reserve: at most `limit`, and as many members as `budget` leaves.
local budget, discarded = 1000, 0

local function discard(line, members)
  budget = budget - #members
  if #members > 0 then
    discarded = discarded + redis.call('ZREM', line, unpack(members))
  end
end

local function lease_due(line, limit, now)
  local ids, deliveries, token = {}, {}, nil
  local function lease(low, high)
    local junk
    repeat
      local room = math.min(limit - #ids, budget)
      local found = redis.call('ZRANGEBYSCORE', line, low, text(high), 'WITHSCORES', 'LIMIT', 0, room)
      local moves = {}
      junk = {}
      for i = 1, #found, 2 do
        local id, score = found[i], tonumber(found[i + 1])
        if is_id(id) and ours(score) then
          token = token or new_token(line, KEYS[2], now + tonumber(ARGV[1]))
          local delivery = math.min(score % DELIVERIES + 1, DELIVERIES - 1)
          ids[#ids + 1], deliveries[#ids + 1] = id, delivery
          moves[#moves + 1], moves[#moves + 2] = text(token + delivery), id
        else
          junk[#junk + 1] = id
        end
      end
      if #moves > 0 then
        redis.call('ZADD', line, 'XX', unpack(moves))
      end
      budget = budget - #moves / 2
      discard(line, junk)
    until #junk == 0 or #ids == limit or budget == 0
  end
  lease(text(LEASED), LEASED + now * MS + MS - 1)
  lease('-inf', (now + tonumber(ARGV[2])) * MS + MS - 1)
  lease(text(LEASED + (now + tonumber(ARGV[3])) * MS + MS), BEYOND - 1)
  discard(line, redis.call('ZRANGEBYSCORE', line, text(BEYOND), '+inf', 'LIMIT', 0, budget))
  return {token or -1, ids, deliveries}
end

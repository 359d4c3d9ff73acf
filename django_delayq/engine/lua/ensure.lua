-- Adds entries, and moves pending ones forward; never back, and never a leased one. May be repeated.
-- A lease that ends later than any lease may (the server's clock was set back, or it is a forgery) is ignored: without
-- this rule such an entry would never become due. The head is set in any case: the sweep so restores one that was lost.
-- KEYS heads line
-- ARGV wake last_ms max_lease_ms [score id ...]
-- RETURN number of entries added or moved

--- include score
--- include clock
--- include head
--- include keep
--- include wake

-- Read first, so that foreign heads stop the command before it has changed anything.
redis.call('ZCARD', KEYS[1])
local head = waiting_head(KEYS[2])
local count = (#ARGV - 3) / 2
local changed = redis.call('ZADD', KEYS[2], 'NX', unpack(ARGV, 4))

if changed < count then
  local ids, moves = {}, {}
  for i = 1, count do
    ids[i] = ARGV[2 * i + 3]
  end
  local scores = redis.call('ZMSCORE', KEYS[2], unpack(ids))
  local no_lease = LEASED + (now_ms() + tonumber(ARGV[3])) * MS + MS
  for i = 1, count do
    local held, wanted = tonumber(scores[i]), tonumber(ARGV[2 * i + 2])
    local deliveries = math.floor(held % DELIVERIES)
    if held >= no_lease then
      moves[#moves + 1], moves[#moves + 2] = text(wanted), ids[i]
    elseif held < LEASED and wanted < held - deliveries then
      moves[#moves + 1], moves[#moves + 2] = text(wanted + deliveries), ids[i]
    end
  end
  if #moves > 0 then
    changed = changed + redis.call('ZADD', KEYS[2], 'XX', 'LT', 'CH', unpack(moves))
  end
end

set_head(KEYS[1], KEYS[2])
keep(KEYS, tonumber(ARGV[2]))
wake_if_earlier(KEYS[2], ARGV[1], head)
return changed

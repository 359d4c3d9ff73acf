-- The parts of a score: leased * 2^52 + ms * 2^10 + seq * 2^4 + deliveries, an exact integer below 2^53.
--   pending: leased 0, ms the due time, seq 0        leased: leased 1, ms the lease's expiry
-- So pending entries sort before leased ones, each kind by time. Numbers are passed to commands only through text():
-- Lua's own tostring keeps 14 digits and would move an entry by minutes.
local LEASED, BEYOND = 4503599627370496, 9007199254740992
local DELIVERIES, MS = 16, 1024

local function text(number)
  return string.format('%.0f', number)
end

local function ours(score)
  return score >= 0 and score < BEYOND and score % 1 == 0
end

local function ms_of(score)
  return math.floor((score % LEASED) / MS)
end

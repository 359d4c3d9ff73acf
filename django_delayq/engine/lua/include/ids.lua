-- An id is what this library writes: a decimal integer in [1, 2^63), without sign, space or leading zero.
local function is_id(member)
  if #member > 19 or not string.find(member, '^[1-9]%d*$') then
    return false
  end
  return #member < 19 or member <= '9223372036854775807'
end

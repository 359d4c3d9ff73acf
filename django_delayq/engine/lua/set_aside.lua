-- Renames keys of a type that is not ours out of the way. They are somebody's: nothing is deleted, and nothing is
-- renamed over a key that exists. One script, so that of two workers only one moves a key, never the fresh one after it.
-- KEYS entries counter entries_aside counter_aside
-- ARGV
-- RETURN {new name ...}

local renamed = {}
for i, wanted in ipairs({'zset', 'string'}) do
  local found = redis.call('TYPE', KEYS[i]).ok
  if found ~= wanted and found ~= 'none' and redis.call('RENAMENX', KEYS[i], KEYS[i + 2]) == 1 then
    renamed[#renamed + 1] = KEYS[i + 2]
  end
end
return renamed

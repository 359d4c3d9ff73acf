-- Renames keys of a type that is not ours. They belong to another application: none is deleted, and no existing key is
-- overwritten. One script, so that of two workers only one renames a key, and none renames its replacement.
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

-- Renames keys of a type that is not ours. They belong to another application: none is deleted, and no existing key is
-- overwritten. One script, so that of two workers only one renames a key, and none renames its replacement.
-- KEYS [key new_name ...]
-- ARGV [type ...]
-- RETURN {new name ...}

local renamed = {}
for i = 1, #KEYS, 2 do
  local found = redis.call('TYPE', KEYS[i]).ok
  local wanted = ARGV[(i + 1) / 2]
  if found ~= wanted and found ~= 'none' and redis.call('RENAMENX', KEYS[i], KEYS[i + 1]) == 1 then
    renamed[#renamed + 1] = KEYS[i + 1]
  end
end
return renamed

-- guard: do nothing on a shard whose layout is not the one that the caller knows.
--
-- KEYS[1]  layout (key): the shard's layout, "{tag}:layout". All other keys are made from its tag, so that all of them
--          are in one slot.
-- ARGV[1]  expected (text): version of the layout that the caller knows, "SCHEMA:SHARDS:EPOCH", and ":draining" after
--          it if another layout takes the adds
-- Returns  the error "LAYOUT" and the version that is stored, if that is another one. A shard without a layout is empty:
--          the scripts that begin a namespace (CREATES) refuse it too, the others go on and find nothing.

local call, try = redis.call, redis.pcall
local layout, expected = KEYS[1], ARGV[1]
local tag = string.sub(layout, 1, -7)

-- While a cluster moves a slot key by key, a key that has moved looks like one that never existed. There, reading a key
-- that never exists fails: here, before anything is done. So no script takes half a shard for a whole one.
call('HGET', tag .. 'nothing', 'version')

local version, shift, latest, has_mutes, claimed = -- the last are the limits of the latest claim
  unpack(call('HMGET', layout, 'version', 'shift', 'clock', 'mutes', 'limits'), 1, 5)
if version ~= expected and (version or CREATES) then
  return redis.error_reply('LAYOUT ' .. (version or 'none'))
end

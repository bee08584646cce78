-- reshard: let another layout take the adds of a namespace, and drain the one that did; or end that.
--
-- Flags     repeatable
-- Commands  HDEL HMGET HSET TIME
-- Reply     int
-- KEYS[1]   root (key): the namespace's layout
-- ARGV[1]   old (text): the layout that is to be drained, "SCHEMA:SHARDS:EPOCH"
-- ARGV[2]   timing (late)
-- ARGV[3]   new (text): the layout that takes the adds from now on; '': the other one is drained
-- Returns   1 if that is so now, 0 if the namespace has another layout
--
-- Needs     late

local root, old, new = KEYS[1], ARGV[1], ARGV[3]
local found = redis.call('HMGET', root, 'current', 'version', 'drains')
local current, drains = found[1] or found[2], found[3]
if new == '' then
  if drains == old then
    redis.call('HDEL', root, 'drains')
  end
  return (not drains or drains == old) and 1 or 0
end
if current == old and not drains then
  redis.call('HSET', root, 'current', new, 'drains', old)
  return 1
end
return current == new and drains == old and 1 or 0

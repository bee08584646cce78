-- drain: mark a shard of a layout that takes no adds any more, so that only those who know of that go on with it.
--
-- Flags     repeatable
-- Commands  HGET HSET TIME XADD
-- Reply     [int, text]
-- KEYS[1]   layout (key): the shard's
-- ARGV[1]   expected (text): its version, "SCHEMA:SHARDS:EPOCH"
-- ARGV[2]   timing (late)
-- ARGV[3]   draining (text): that of a shard that is being drained
-- Returns   1 and the version that is stored now: a write in any case, whose replication can be waited for
--
-- Needs     late

local layout, expected, draining = KEYS[1], ARGV[1], ARGV[3]
local version = redis.call('HGET', layout, 'version')
if not version or version == expected then
  redis.call('HSET', layout, 'version', draining)
  -- wake the sleeping workers, so that they serve the new shards from now on
  redis.pcall('XADD', string.sub(layout, 1, -7) .. 'wake', 'MAXLEN', 1, '*', 'at', 0)
  return {1, draining}
end
redis.call('HSET', layout, 'version', version)
return {1, version}

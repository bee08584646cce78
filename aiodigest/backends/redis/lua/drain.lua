-- drain: mark a shard of a layout that takes no adds any more, so that only those who know of that go on with it.
--
-- KEYS[1]  the shard's layout
-- ARGV[1]  its version, "SCHEMA:SHARDS:EPOCH"
-- ARGV[2]  that of a shard that is being drained
-- Returns  1 and the version that is stored now: a write in any case, whose replication can be waited for

local version = redis.call('HGET', KEYS[1], 'version')
if not version or version == ARGV[1] then
  redis.call('HSET', KEYS[1], 'version', ARGV[2])
  -- wake the sleeping workers, so that they serve the new shards from now on
  redis.pcall('XADD', string.sub(KEYS[1], 1, -7) .. 'wake', 'MAXLEN', 1, '*', 'at', 0)
  return {1, ARGV[2]}
end
redis.call('HSET', KEYS[1], 'version', version)
return {1, version}

-- layout: record which layout a shard, or the namespace, has, unless it has one.
--
-- KEYS[1]  the layout
-- ARGV[1]  its version, "SCHEMA:SHARDS:EPOCH"
-- Returns  the version that is stored now

redis.call('HSETNX', KEYS[1], 'version', ARGV[1])
return redis.call('HGET', KEYS[1], 'version')

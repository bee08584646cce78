-- layout: record which layout a shard, or the namespace, has, unless it has one.
--
-- KEYS[1]  the layout
-- ARGV[1]  the field: "version" of a shard, "current" of the namespace
-- ARGV[2]  its version, "SCHEMA:SHARDS:EPOCH"
-- Returns  the version that is stored now

redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])

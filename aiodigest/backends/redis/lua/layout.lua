-- layout: record which layout a shard, or the namespace, has, unless it has one.
--
-- KEYS[1]  the layout
-- ARGV[1]  the field: "version" of a shard, "current" of the namespace
-- ARGV[2]  its version, "SCHEMA:SHARDS:EPOCH"
-- Returns  1 and the version that is stored now: a write in any case, whose replication can be waited for

if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  redis.call('HSET', KEYS[1], ARGV[1], redis.call('HGET', KEYS[1], ARGV[1]))
end
return {1, redis.call('HGET', KEYS[1], ARGV[1])}

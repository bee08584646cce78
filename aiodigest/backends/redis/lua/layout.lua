-- layout: record which layout a shard, or the namespace, has, unless it has one.
--
-- Flags     repeatable
-- Parts     add, deliver
-- Commands  HGET HSET HSETNX TIME
-- Reply     [int, text]
-- KEYS[1]   layout (key)
-- ARGV[1]   field (text): "version" of a shard, "current" of the namespace
-- ARGV[2]   timing (late)
-- ARGV[3]   version (text): "SCHEMA:SHARDS:EPOCH"
-- Returns   1 and the version that is stored now: a write in any case, whose replication can be waited for
--
-- Needs     late

local layout, field, version = KEYS[1], ARGV[1], ARGV[3]
if redis.call('HSETNX', layout, field, version) == 0 then
  version = redis.call('HGET', layout, field)
  redis.call('HSET', layout, field, version)
end
return {1, version}

-- delete: drop a timeline, whatever state its keys are in; a delivery under way will hear that it was deleted. A mute
-- stays.
--
-- Parts     move by hand
-- Commands  EXISTS HDEL HGET HGETALL HLEN HMGET HSET PEXPIRE TIME UNLINK ZCARD ZRANGE ZREM
-- Reply     number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- Returns   1 if it was scheduled, else 0
--
-- Needs     guard clock tick timelines schedule fencing

local key = ARGV[3]
local names = {logs .. key, opens .. key, metas .. key, indexes .. key, tag .. 'seen:' .. key}
local has_keys = call('EXISTS', unpack(names)) > 0 -- which a user who only adds may not run, so that it deletes nothing
local held = load(key) or thaw(key, {})
local existed = leave(key) or held.due > 0 -- or nothing but a mute kept it
while leave(key) do end -- another program may have put it into several sets
if has_keys then
  call('UNLINK', unpack(names))
end
try('ZREM', tag .. 'seens', key)
if held.id and held.token then
  answer(held, held.token, held.id, 'deleted', '', 0)
end
if held.done then -- also of an earlier outcome, so that a repeated call hears what the first one did
  local grave = thaw(key, {})
  grave.done = held.done
  save(grave, FIELDS)
end
return existed and 1 or 0

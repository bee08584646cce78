-- remove: drop a record from the log, and from the records of a digest in a retry wait after reported failures.
--
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LRANGE PEXPIRE RPUSH TIME UNLINK XADD ZADD ZCARD ZRANGE ZREM
--           ZSCORE
-- Reply     number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   name (text): the record's identity
-- ARGV[5]   limits (limits)
-- ARGV[6]   nonce (text): names the digest whose contents change
-- Returns   1 if a record went, 0 if there is none, -1 if a value stays in a digest; the text of an error if the timeline
--           is broken
--
-- Needs     guard clock tick settling entries lists

local key, name, limits, nonce = ARGV[3], ARGV[4], parse_limits(ARGV[5]), ARGV[6]
local held, problem = load_all(key)
if not held then
  return problem
end
if held.logged + held.opened == 0 then
  return 0
end

-- Return the first `length` of `kept` without the record, and whether it was there.
local function without(kept, length)
  local rest = {}
  for index = 1, length do
    if identity(kept[index]) ~= name then
      rest[#rest + 1] = kept[index]
    end
  end
  return rest, #rest < length
end

-- trimmed first, so that a record which the capacity had dropped does not come back in the removed one's place
local records = collect({}, {}, logs .. key, held.logged)
local left = math.min(#records, limits.capacity)
local rest, removed = without(records, left)
if #rest < held.logged then
  uncount(held)
  rewrite(logs .. key, rest, #rest, lifetime(held, limits.ttl))
  held.logged = #rest
  if #rest == 0 and held.needs then
    held.bytes = 0
  end
end
if #records > left then
  held.dropped = held.dropped + #records - left
  try('HINCRBY', layout, 'dropped', #records - left)
end

local stays = false
if held.opened > 0 then
  local newest_first = {}
  for stop = held.opened - 1, 0, -SLICE do
    local opened = call('LRANGE', opens .. key, math.max(0, stop - SLICE + 1), stop)
    for index = #opened, 1, -1 do
      newest_first[#newest_first + 1] = opened[index]
    end
  end
  local still, went = without(newest_first, #newest_first)
  if went and (not held.id or held.frozen or held.token or not (call('ZSCORE', waiting, key) or held.due > 0)) then
    stays = true -- it may be delivered again as it is
  elseif went then
    removed = true
    held.id = nonce
    rewrite(opens .. key, still, #still, lifetime(held, limits.ttl))
    if #still == 0 then
      end_delivery(held)
      settle(held, limits.max_size, limits.ttl)
    end
  end
end
if held.logged + held.opened == 0 and not held.id then
  settle(held, limits.max_size, limits.ttl)
end
save(held, FIELDS)
wake()
return stays and -1 or removed and 1 or 0

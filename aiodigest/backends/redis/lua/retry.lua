-- retry: charge deliveries that failed, or may have, an attempt, and let them wait for the next.
--
-- Flags     repeatable
-- Parts     deliver
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LPUSH LRANGE LTRIM PERSIST PEXPIRE TIME UNLINK XADD ZADD
--           ZCARD ZCOUNT ZMSCORE ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   nonce (items): for the name of a digest whose contents change
-- ARGV[4]   first (items)
-- then      for each: key; token; digest id; delay, ms; error; ttl, ms; entries taken; records delivered; records aged;
--           1 to charge no attempt; 1 if the outcome is unknown; hours, or ''; number of ids that stay (-1: all), ids;
--           for how long what was delivered is not delivered again, ms; if that is not 0, number of ids that were
--           delivered (-1: all but those that stay, and too old), ids
-- Returns   for each: 1, 0 if the lease is lost, or the text of an error. Fewer than asked for if much had to be read;
--           the rest was not looked at.
--
-- Needs     guard clock timelines fencing items hours

call('PERSIST', layout)
-- Needs     tick

-- Keep of the first `taken` entries only those that failed. An empty choice would leave nothing to try: all stay.
local function keep(held, item)
  -- Needs    entries lists
  local open = opens .. held.key
  local kept = {}
  for _, entry in ipairs(collect({}, {}, open, math.min(item.taken, held.opened))) do
    if item.failed[identity(entry)] then
      kept[#kept + 1] = entry
    end
  end
  if #kept == 0 then
    return
  end
  if item.window > 0 then
    -- Needs    seen
    remember(held, item.taken, item.window, item.delivered_ids, item.failed)
  end
  call('LTRIM', open, item.taken, -1)
  push_front(open, kept)
  call('PEXPIRE', open, lifetime(held, item.ttl))
  held.id, held.open_dropped = new_name(), 0
  if item.delivered > 0 then
    held.parted = '1'
    count('digests', 1)
  end
  count('delivered', item.delivered)
  count('aged', item.aged)
end

local function retry(item)
  local held, answered, status = load_held(load_all, item.key, item.token, item.digest_id)
  if not held then
    return status == 'released' and 0 or answered
  end
  if item.failed and not held.frozen then
    keep(held, item)
  end
  if item.unknown then
    held.frozen = '1'
  end
  if item.give_back then
    held.since = held.since > 0 and held.since or now
  end
  if not item.give_back or now - held.since > GIVE_BACK_MS then
    held.attempts = held.attempts + 1
  end
  held.error, held.token, held.lost = item.error, nil, 0
  if held.flush then
    held.pass = '1'
  end
  local due = within(not held.pass and item.hours, held.key, now + item.delay)
  touch(held, due - now + item.ttl) -- it must still be there when its time comes
  leave(held.key)
  place(held.key, due)
  answer(held, item.token, item.digest_id, 'closed', '', 0)
  save(held, FIELDS)
  return 1
end

local function next_item()
  local item = {
    key = next_argument(), token = next_argument(), digest_id = next_argument(), delay = next_number(),
    error = next_argument(), ttl = next_number(), taken = next_number(), delivered = next_number(),
    aged = next_number(), give_back = next_flag(), unknown = next_flag(),
    hours = parse_hours(next_argument()), failed = next_ids(), window = next_number(),
  }
  if item.window > 0 then
    item.delivered_ids = next_ids()
  end
  return item
end

return answer_each(next_item, retry)

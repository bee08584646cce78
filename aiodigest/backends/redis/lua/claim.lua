-- claim: promote what is due and open digests, the oldest due first or drawn at random, and one whose lease has ended.
--
-- Flags     begins-namespace
-- Parts     deliver
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LRANGE PERSIST PEXPIRE RENAME RPUSH TIME UNLINK XADD
--           XREVRANGE ZADD ZCARD ZMSCORE ZRANDMEMBER ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
-- Reply     [int, int, text, [list...], [text...], [number...], int, [text...], int, int]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   slots (int): how many digests to open, at most 100 a call
-- ARGV[4]   lease (int, ms)
-- ARGV[5]   limits (limits): of the engine
-- ARGV[6]   nonce (text): for the names of tokens and digests
-- ARGV[7]   sample (flag): draw from what is ready, what has not failed first: its receiver may be one that works
-- ARGV[8]   bound (int, bytes): what a digest may decode to, kept with each that is new
-- ARGV[9]   doubtful (flag): open one digest whose lease ended without a word, if there is one; it may end its worker.
--           One that is to run alone is opened alone: what came with it would end with it
-- ARGV[10]  features (text): that the worker knows, separated by spaces
-- Returns   now; how long until something is due, us (-1: nothing is held); id of the last wake-up; leases; broken
--           timelines (key, error, ...); expired timelines (key, number of records, ...); 1 if leases have ended that this
--           claim could not take; timelines that are left to others (key, a feature that it needs, ...); how far the
--           shard's clock is ahead of the server's, ms; how many dead letters were let go, as their time is over: a claim
--           that opens nothing looks for some
--
-- Needs     guard clock budget lease promotion gap needs

call('PERSIST', layout) -- a write that needs no memory: after it a full server lets this script drain it
-- Needs     tick

local slots, lease, limits, nonce = tonumber(ARGV[3]), tonumber(ARGV[4]), parse_limits(ARGV[5]), ARGV[6]
local sample, bound = ARGV[7] == '1', tonumber(ARGV[8])
local features = ARGV[10]
local doubtful = ARGV[9] == '1' -- from now on: whether it may be given one
local most = math.min(slots, 100)
local leases, broken, expired, left = {}, {}, {}, {}
-- Read before anything is taken. Where another program has put what cannot wake anybody (a key of another type, or an id
-- after which there is none), it goes.
local stream = tag .. 'wake'
local found_wake = try('XREVRANGE', stream, '+', '-', 'COUNT', 1)
local last_wake = found_wake[1]
if found_wake.err or last_wake and string.find(last_wake[1], '^18446744073709551615%-') then
  call('UNLINK', stream)
  last_wake = nil
end

local function expire(held, from)
  -- Needs    entries
  local key, seen = held.key, {}
  local records = collect(collect({}, seen, logs .. key, held.logged), seen, opens .. key, held.opened)
  call('ZREM', from, key)
  call('UNLINK', logs .. key, opens .. key, metas .. key, indexes .. key)
  if #records > 0 then
    try('HINCRBY', layout, 'expired', #records)
  end
  expired[#expired + 1] = key
  expired[#expired + 1] = #records
end

local looked = 0 -- timelines
local is_plain = limits.max_size == 0 and limits.max_age == 0 and bound == DIGEST_BYTES

-- Let a doubtful digest wait where those wait whose leases have ended: at the head of `ready` it would block others.
local function defer(key, due)
  looked = looked + 1
  call('ZREM', ready, key)
  call('ZADD', leased, math.min(due, now), key)
end

-- Return whether a digest is to run alone, once it is opened.
local function is_alone(held)
  return held.lost + (held.token and 1 or 0) >= ALONE
end

-- Draw from what is ready; return each with its due time. What is drawn from few comes in the order of the set, so that
-- the first would be the same ones each time: it is shuffled, by what no other call is given.
local function draw()
  local drawn, random = call('ZRANDMEMBER', ready, SAMPLE, 'WITHSCORES'), 1
  for index = 1, #nonce do
    random = (random * 16807 + string.byte(nonce, index)) % 2147483647
  end
  for last = #drawn - 1, 3, -2 do
    random = random * 16807 % 2147483647 -- Park and Miller, 1988
    local other = 2 * (random % ((last + 1) / 2)) + 1
    drawn[last], drawn[other] = drawn[other], drawn[last]
    drawn[last + 1], drawn[other + 1] = drawn[other + 1], drawn[last + 1]
  end
  return drawn
end

-- Return what to look at next, with the due times, and whether nothing else is ready.
local function candidates(wanted)
  if not sample then
    local oldest = call('ZRANGE', ready, 0, wanted - 1, 'WITHSCORES')
    return oldest, #oldest < 2 * wanted
  end
  local drawn, fresh, failed, may_be_had = draw(), {}, {}, doubtful
  for index = 1, #drawn, 2 do
    local key, due = drawn[index], drawn[index + 1]
    local attempts, token, lost = unpack(try('HMGET', metas .. key, 'attempts', 'token', 'lost'))
    if (token or lost) and may_be_had then
      may_be_had = false
      table.insert(fresh, 1, due)
      table.insert(fresh, 1, key)
    elseif token or lost then
      defer(key, tonumber(due))
    else
      local group = attempts and failed or fresh
      group[#group + 1] = key
      group[#group + 1] = due
    end
  end
  for _, each in ipairs(failed) do
    fresh[#fresh + 1] = each
  end
  return {unpack(fresh, 1, 2 * wanted)}, #drawn == 0
end

local function is_placed(key)
  for _, set in ipairs({leased, ready, waiting}) do
    if call('ZMSCORE', set, key)[1] then
      return true
    end
  end
end

-- Look at the mutes whose time has come: they are over, or what waits under them has reached its end, or came since.
local function look_at_mutes()
  -- Needs    unmuting
  for _, key in ipairs(call('ZRANGEBYSCORE', mutes, '-inf', now, 'LIMIT', 0, LOOKS)) do
    if scanned >= SLICE then
      return -- the next claim looks at the others, at once
    end
    local ends, held, problem = mute_of(key) or now, load_all(key)
    local waits = held and held.logged + held.opened > 0 and not is_placed(key)
    if problem then
      call('ZADD', mutes, now + lease, key)
      broken[#broken + 1] = key
      broken[#broken + 1] = problem
    elseif ends <= now then
      unmute(held, ends, waits, limits.max_size, limits.ttl)
    elseif not waits then
      call('ZADD', mutes, ends, key)
    else
      touch_muted(held, ends, held.own and parse_limits(held.own).ttl or limits.ttl)
      if held['end'] <= now then
        expire(held, ready)
        call('ZADD', mutes, ends, key)
      else
        call('ZADD', mutes, math.min(ends, held['end']), key)
        need_mutes(held, true)
        save(held, FIELDS)
      end
    end
  end
end

-- Keep what was under delivery as its timeline was muted from going out again; return whether it is muted.
local function is_kept_back(from, key, due)
  -- Needs    schedule mutes
  local ends = mute_of(key)
  if ends and ends > now then
    call('ZREM', from, key)
    place(key, due)
    return true
  end
end

-- Return the limits by which records are dropped: none by those of an engine that takes all that a timeline may hold, as
-- one does whose policy is a function.
local function strict_limits()
  return limits.capacity < MAX_CAPACITY and ARGV[5] or ''
end

local recoverable, hold = watch_gap(lease, strict_limits())
promote(waiting, now)
if has_mutes then
  look_at_mutes()
end

local is_empty = false -- nothing is ready any more

-- Leave a timeline to workers that know what it needs: it is no longer in the way of others, and stays due when it was.
local function leave_to_others(key, from, due, need)
  call('ZREM', from, key)
  call('ZADD', waiting, now + ASIDE_MS, key)
  call('ZADD', postponed, due, key)
  left[#left + 1] = key
  left[#left + 1] = need
end

-- Open what most digests are: the log of a timeline as it is, whose hash has no fields but those that all timelines with
-- records have (one that is muted has `due`, or needs that). Return the lease, or nothing, having done nothing, if it is
-- not so; `take` would do the same.
local function take_plain(key, due)
  local meta, log, open = metas .. key, logs .. key, opens .. key
  local fields = try('HMGET', meta, 'end', 'last', 'iteration', 'cool', 'done')
  local ends, iteration, known = whole(fields[1] or ''), whole(fields[3] or '0'), 0
  for index = 1, 5 do
    known = known + (fields[index] and 1 or 0)
  end
  if not (ends and iteration and whole(fields[2] or '0') and whole(fields[4] or '0')) or ends < now + limits.ttl
    or known ~= call('HLEN', meta) or try('LLEN', open) ~= 0 then
    return
  end
  local size, token = try('LLEN', log), nonce .. '-' .. (#leases + 1)
  if type(size) == 'table' or size == 0 or size > limits.capacity then
    return
  end
  call('RENAME', log, open)
  call('ZREM', ready, key)
  call('ZADD', leased, now + lease, key)
  call('HSET', meta, 'id', token, 'token', token)
  return {key, token, token, 1, iteration + 1, 0, due, size, 0, 0, '', 0, bound, '', 0, inline(open, size)}
end

local function consider(from, key, due)
  local plain = is_plain and from == ready and take_plain(key, due)
  if plain then
    looked = looked + 1
    leases[#leases + 1] = plain
    return
  end
  local held, problem = load_all(key)
  local need = held and unknown_need(held, features)
  looked = looked + 1
  if not held then
    call('ZREM', from, key)
    call('ZADD', waiting, now + lease, key)
    broken[#broken + 1] = key
    broken[#broken + 1] = problem
  elseif need then
    leave_to_others(key, from, due, need)
  elseif held.logged + held.opened == 0 or held['end'] > 0 and held['end'] <= now then -- 0: its meta is not here
    expire(held, from)
  elseif has_mutes and is_kept_back(from, key, due) then
    return
  elseif from == ready and is_doubtful(held) and not doubtful then
    defer(key, due)
  elseif is_alone(held) and #leases > 0 then
    most, is_empty = #leases, false -- the next claim may open it
  else
    doubtful = doubtful and from == ready and not is_doubtful(held)
    most = is_alone(held) and 1 or most
    leases[#leases + 1] = take(held, due, lease, limits, nonce .. '-' .. (#leases + 1), bound)
  end
end

-- Open the digest whose lease ended first, if the caller may have one.
local function take_ended()
  while doubtful and #leases < most and looked < SLICE and scanned < SLICE do
    local ended = call('ZRANGEBYSCORE', leased, '-inf', recoverable, 'WITHSCORES', 'LIMIT', 0, 1)
    if not ended[1] then
      return
    end
    consider(leased, ended[1], tonumber(ended[2]))
  end
end

take_ended() -- before all others, of which there may be many
while not is_empty and #leases < most and looked < SLICE and scanned < SLICE do
  -- whatever is looked at leaves the set, so the next candidates are always its first
  local found
  found, is_empty = candidates(most - #leases)
  for index = 1, #found, 2 do
    if scanned >= SLICE or #leases >= most then
      is_empty = false
      break
    end
    consider(ready, found[index], tonumber(found[index + 1]))
  end
end

local function first_end(from)
  return tonumber(call('ZRANGEBYSCORE', leased, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
end

local next_end, barred, wait = first_end('-inf'), false, -1
if next_end and next_end <= recoverable and not doubtful then -- whoever may take it is told by others
  barred, next_end = true, first_end(string.format('(%.0f', recoverable))
end
if not is_empty and call('ZCARD', ready) > 0 then
  wait = 0
else
  local next_due = tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2])
  local next_look = has_mutes and tonumber(call('ZRANGE', tag .. 'mutes', 0, 0, 'WITHSCORES')[2]) or NEVER_MS
  next_due = next_look < NEVER_MS and math.min(next_due or math.huge, next_look) or next_due
  if next_due or next_end then
    if next_end and next_end > recoverable then
      next_end = math.max(next_end, hold)
    end
    wait = math.max(0, 1000 * (math.min(next_due or math.huge, next_end or math.huge) - now) - micros)
  end
end
local let_go = 0
if #leases == 0 then
  -- Needs   dead
  let_go = drop_old(LOOKS)
  if let_go > 0 then
    try('HINCRBY', layout, 'letters_dropped', let_go)
  end
  wait = let_go == LOOKS and 0 or wait -- there may be more
end
return {now, wait, last_wake and last_wake[1] or '0-0', leases, broken, expired, barred and 1 or 0, left, shift, let_go}

-- add: append records to their logs, and open or push the windows of their timelines.
--
-- Flags     begins-namespace, replicated
-- Parts     add
-- Commands  HDEL HGET HINCRBY HMGET HSET LLEN LRANGE LTRIM PEXPIRE RPUSH TIME UNLINK XADD ZADD ZCARD ZMSCORE ZRANGE
--           ZREM ZSCORE
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- then      for each terms of a policy: delays "initial increment maximum", ms, or JSON of more; limits
--           "capacity max_size max_age ttl", times in ms; 1 if these limits are the timeline's own, and 2 more if it is to
--           be flushed after each; how many single entries follow, and how many groups after these. A single entry is its
--           key and the entry, which lacks what is filled in at its beginning. A group is what is added to one timeline:
--           key; number of entries, negative if each lacks what is filled in; if the terms bound the bytes of a digest,
--           those of each, "bytes bytes ..."; the entries
-- Returns   the number of entries that were looked at: less than all if much had to be compacted. If workers drop by other
--           limits than some of these, it is a text with their limits behind it, "number capacity ...". Then, for each
--           that made its timeline ready, which it is (from 1); and for each that failed, which it is, and its error:
--           "STALE" and the server's time, ms, if its terms do not tell of that.
--
-- Needs     guard clock tick budget window

-- All that an add must know of its timeline: little if that is ready or leased, more to push a window, all to open one.
local SETTLED = {'end', 'own'}
local PUSHED = {'end', 'own', 'id', 'last', 'cool', 'counted', 'needs'}
local OPENED = {'end', 'own', 'id', 'last', 'cool', 'counted', 'iteration', 'opening', 'needs', 'due'}
local BY_RULE = {'end', 'own', 'id', 'last', 'cool', 'counted', 'needs', 'iteration', 'opening', 'next', 'due'}

-- Fill in the time of arrival. Most entries come without what they begin with then, which is made once for all.
local arrival = struct.pack('>I6', now - shift)
local prefix = string.char(VERSION + ARRIVAL) .. arrival

local function stamp(first, last, are_short)
  for index = first, last do
    local entry = ARGV[index]
    if are_short then
      ARGV[index] = prefix .. entry
    elseif math.floor(string.byte(entry) / ARRIVAL) % 2 == 1 then
      ARGV[index] = string.sub(entry, 1, 1) .. arrival .. string.sub(entry, 8)
    end
  end
end

-- Drop what a log holds more than once or beyond its capacity.
local function compact(held, length, terms)
  -- Needs    entries lists
  local log = logs .. held.key
  local kept = collect({}, {}, log, length)
  local left = math.min(#kept, terms.capacity)
  if #kept == length then
    call('LTRIM', log, -left, -1)
  else
    rewrite(log, kept, left, lifetime(held, terms.ttl))
  end
  if #kept > left then
    try('HINCRBY', metas .. held.key, 'dropped', #kept - left) -- what is no number is found by the claim
    try('HINCRBY', layout, 'dropped', #kept - left)
  end
end

-- Return what is known of a timeline from fields of these names.
local function take_over(key, names, fields)
  local held = setmetatable({key = key, stored = {}}, ABSENT)
  for index, name in ipairs(names) do
    if fields[index] then
      thaw_field(held, name, fields[index])
    end
  end
  return held
end

-- Return what an add that changes nothing of the meta must know of a timeline that waits; nothing if it must know more.
local function take_little(key, due, fields)
  local id, last, cool, counted = fields[3], fields[4], fields[5], fields[6]
  if due > now and last and not (id or counted) then
    local held = {key = key, last = whole(last), cool = whole(cool or '0')}
    return held.last and held.cool and held
  end
end

-- Return until when a timeline is muted, and whether what is added is dropped; or the error of one whose mute is over, and
-- which cannot be read.
local function heed_mute(key, terms)
  -- Needs    state unmuting
  local ends, drops = mute_of(key)
  if not ends or ends > now then
    return ends, drops
  end
  local held, problem = load_by_name(key)
  if held then
    unmute(held, ends, state_of(key) == 'muted', terms.max_size, terms.ttl)
  end
  return nil, nil, problem
end

-- Append ARGV[first] to ARGV[last] to the log of a timeline: all of them, or up to the first that brings the log to a
-- bound, or none if it would have to be read then and much has been read already. So nothing has to be looked at but
-- after the last of them, and it is as if they had come one by one. Return which was the last, which made the timeline
-- ready, if one did, and the error of all, if they have one.
local function append(key, terms, first, last, is_muted)
  local log, meta = logs .. key, metas .. key
  local settled, due, names, fields = call('ZSCORE', ready, key), nil, SETTLED, nil
  if settled and not terms.rule then
    fields = try('HMGET', meta, 'end', 'own')
  else
    due = not settled and tonumber(call('ZSCORE', waiting, key)) or nil
    settled = settled or not due and call('ZSCORE', leased, key)
    names = terms.rule and BY_RULE or settled and SETTLED or due and PUSHED or OPENED
    fields = try('HMGET', meta, unpack(names))
    settled = settled or is_muted and not due and fields[#names] -- nothing pushes what waits under a mute
  end
  if fields.err then
    return last, nil, fields.err
  end
  if due and fields[7] and call('ZSCORE', postponed, key) then
    settled, due = true, nil -- it was ready, and was left to other workers
  end
  -- Most adds change nothing of the meta, and are spared what follows for the others: of a timeline that is ready or leased
  -- they change nothing but its log. Here `end` is only compared; a claim finds one that is another kind of number.
  local ends, held = fields[1] and tonumber(fields[1]), nil
  local plain = not terms.rule and ends and ends >= terms.fresh and ends < 1e15 and fields[2] == terms.kept
  if not settled then
    held = plain and due and terms.max_size == 0 and take_little(key, due, fields)
    plain = held
  end
  if not plain then
    held = take_over(key, names, fields)
    if held.problem then
      return last, nil, held.problem
    end
  end

  local number = last - first + 1
  local length = number == 1 and try('RPUSH', log, ARGV[first]) or try('RPUSH', log, unpack(ARGV, first, last))
  if type(length) == 'table' then
    return last, nil, length.err
  elseif length > LONGEST then
    call('LTRIM', log, 0, -number - 1)
    return last, nil, too_long(length - number)
  elseif plain and length > number and length <= terms.most then
    return last, due and open_or_push(held, due, terms, number) and first
  end
  held = plain and take_over(key, names, fields) or held
  local bound = terms.most + 1
  if not settled and terms.max_size > 0 and not held.id then
    bound = held.counted and 0 or math.min(bound, terms.max_size)
  end
  local room = bound - length + number -- with the one that reaches the bound
  room = scanned < SLICE and math.max(1, room) or room - 1
  if number > room then
    call('LTRIM', log, 0, -number - 1)
    if room < 1 then
      return first - 1
    end
    number, last = room, first + room - 1
    length = call('RPUSH', log, unpack(ARGV, first, last))
  end

  local changed = held.own ~= terms.own
  held.own = terms.own
  touch(held, terms.ttl)
  if length == number and not held.touched then
    call('PEXPIRE', log, lifetime(held, terms.ttl))
  end
  local made_ready
  need(held, terms.needs)
  if is_muted and not (settled or due) then -- it is for earlier versions, which may schedule it before any claim looks
    need(held, 'mute')
  end
  local pushes = is_muted and 1 or number -- nothing pushes what has been opened under a mute
  if terms.rule then
    local step = open_or_push_each(held, due, terms, settled, pushes, length - number + pushes)
    made_ready = step and not is_muted and first + step - 1
    if pushes < number then
      gather(held, terms, length)
    end
  elseif not settled and open_or_push(held, due, terms, pushes) then
    made_ready = first
  end
  if not (made_ready or settled or is_muted) then
    local is_full
    is_full, length = fill(held, length, terms, due, ARGV[last])
    made_ready = is_full and last
  end
  if length > terms.most then
    uncount(held)
    compact(held, length, terms)
  end
  if terms.rule or changed or held.touched or not (settled or due) or held.counted ~= (fields[6] or nil) then
    save(held, names)
  end
  return last, made_ready
end

local duplicates = 0

-- Append entries under terms that ask for more, up to the first after which there is something to do; answer as `append`.
-- `seen` are those that were delivered already, and `sizes` the bytes of each.
local function append_some(key, terms, first, last, is_muted, seen, sizes)
  -- Needs    flushing
  if seen[first] then
    duplicates = duplicates + 1
    return first
  end
  local stop, meta = first, metas .. key
  local stored = terms.max_bytes > 0 and try('HGET', meta, 'bytes')
  local total = terms.max_bytes > 0 and (type(stored) == 'string' and whole(stored) or 0)
  total = total and total + sizes[first]
  while stop < last and not (terms.urgent or seen[stop + 1] or total and total >= terms.max_bytes) do
    stop = stop + 1
    total = total and total + sizes[stop]
  end
  local done, made_ready, problem = append(key, terms, first, stop, is_muted)
  if problem or done < first then
    return done, made_ready, problem
  end
  if total then
    for index = done + 1, stop do
      total = total - sizes[index]
    end
    call('HSET', meta, 'max_bytes', terms.max_bytes)
    if total > 0 then
      call('HSET', meta, 'bytes', total)
    end
    local due = tonumber(call('ZSCORE', waiting, key))
    if due and total >= terms.max_bytes and not call('ZSCORE', postponed, key) and not call('HGET', meta, 'id') then
      made_ready = place(key, within(terms, key, math.min(due, now)), true) and done
    end
  end
  if terms.urgent then
    local _, is_ready = flush(key)
    made_ready = made_ready or is_ready and done
  end
  return done, made_ready
end

-- Return which entries of a group were delivered already, and the bytes of each.
local function look_at(key, terms, first, last, bytes)
  -- Needs    seen
  local sizes, index = {}, first
  for size in string.gmatch(bytes, '%d+') do
    sizes[index], index = tonumber(size), index + 1
  end
  return terms.dedupe > 0 and which_seen(key, ARGV, first, last) or {}, sizes
end

local cursor, looked, answer, is_spent, stale = 3, 0, {0}, false, nil
local differ = false

-- Answer with an error for some entries.
local function refuse(first, last, problem)
  for index = first, last do
    answer[#answer + 1] = looked + index - first + 1
    answer[#answer + 1] = problem
  end
end

while cursor <= #ARGV and not is_spent do
  local flags = tonumber(ARGV[cursor + 2])
  local terms = parse_terms(ARGV[cursor], ARGV[cursor + 1], flags % 2 == 1)
  terms.urgent = flags > 1
  differ = differ or claimed and claimed ~= '' and not terms.own and claimed ~= ARGV[cursor + 1]
  local asks, is_measured = terms.urgent or terms.dedupe > 0 or terms.max_bytes > 0, terms.max_bytes > 0
  terms.kept, terms.most = terms.own or false, terms.capacity + math.floor(terms.capacity / 2)
  terms.fresh = now + terms.ttl
  local is_stale = are_stale(terms)
  stale = stale or is_stale and {}
  local singles, groups = tonumber(ARGV[cursor + 3]), tonumber(ARGV[cursor + 4])
  cursor = cursor + 5
  while singles + groups > 0 and not is_spent do
    local key, number, first = ARGV[cursor], -1, cursor + 1
    local seen, sizes, is_muted
    if singles > 0 then
      singles = singles - 1
    else
      number, first, groups = tonumber(ARGV[first]), first + 1, groups - 1
    end
    if is_measured then
      first = first + 1
    end
    cursor = first + math.abs(number)
    if stale and (is_stale or stale[key]) then -- what comes to one timeline stays in order
      stale[key] = true
      refuse(first, cursor - 1, string.format('STALE %.0f', now - shift))
      looked, first = looked + cursor - first, cursor
    elseif has_mutes then
      local drops, unreadable
      is_muted, drops, unreadable = heed_mute(key, terms)
      if drops then
        try('HINCRBY', layout, 'muted', cursor - first) -- fails where another program wrote no number
      elseif unreadable then
        refuse(first, cursor - 1, unreadable)
      end
      if drops or unreadable then
        looked, first = looked + cursor - first, cursor
      end
    end
    stamp(first, cursor - 1, number < 0)
    if asks then
      seen, sizes = look_at(key, terms, first, cursor - 1, is_measured and ARGV[first - 1] or '')
    end
    while first < cursor and not is_spent do
      local last, made_ready, problem
      if seen then
        last, made_ready, problem = append_some(key, terms, first, cursor - 1, is_muted, seen, sizes)
      else
        last, made_ready, problem = append(key, terms, first, cursor - 1, is_muted)
      end
      if made_ready then
        answer[#answer + 1] = looked + made_ready - first + 1
      end
      if problem then
        refuse(first, last, problem)
      end
      is_spent = last < first
      looked, first = looked + last - first + 1, last + 1
    end
  end
end
answer[1] = looked
if differ then
  local marks = call('HMGET', layout, 'seen', 'lease')
  if now - read_time(marks[1]) <= read_time(marks[2]) then -- else there is none, and the next may have others
    answer[1] = string.format('%.0f %s', looked, claimed)
  end
end
if duplicates > 0 then
  try('HINCRBY', layout, 'duplicates', duplicates)
end
wake()
return answer

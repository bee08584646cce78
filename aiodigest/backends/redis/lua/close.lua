-- close: end deliveries that are known to have ended for good, set aside as dead letters what failed, and schedule what
-- came since.
--
-- Flags     repeatable
-- Parts     deliver
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LRANGE LTRIM PERSIST PEXPIRE RPUSH TIME UNLINK XADD ZADD
--           ZCARD ZCOUNT ZMSCORE ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
-- Reply     [list | text...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   nonce (items): for the names of the next digest and of dead letters
-- ARGV[4]   first (items)
-- then      for each: key; token; digest id; entries taken; records delivered; records aged; 1 if it counts as a digest,
--           2 more if nothing of it is to be delivered again, and 4 more to mute it, and drop what is added; cool-down,
--           ms; lease, ms; max_size; ttl, ms; hours in which what came since may be due, or ''; number of dead letters;
--           for each of these: reason, limits that its engine's policy has, what all may take, bytes; number of ids (-1:
--           all records of the part), ids. Then, if nothing is to be delivered again: for how long, ms; number of ids that
--           were delivered (-1: all but those in dead letters, and too old), ids
-- Returns   for each: {status, digest id, entries left, older dead letters that were let go (absent in a repeated
--           answer)}, or the text of an error. Fewer than asked for if much had to be read; the rest was not looked at.
--
-- Needs     guard clock fencing settling items

call('PERSIST', layout)
-- Needs     tick

-- Make a dead letter of the records that each reason names (nil: all) of the part that was taken, unless they are aged.
-- Return how many older ones were let go, and how many records are aged.
local function set_aside(held, letters, taken)
  -- Needs    entries lists dead aging
  local let_go, old = 0, 0

  -- The oldest make room for what is over the bound, and go when their time is over (a few for each new one).
  local function prune(most)
    let_go = let_go + drop_old(10)
    for _ = 1, SLICE do
      if weight() <= most or call('ZCARD', dead) == 1 then
        return
      end
      drop_letter(call('ZRANGE', dead, 0, 0)[1])
      let_go = let_go + 1
    end
  end

  local part = collect({}, {}, opens .. held.key, math.min(taken, held.opened)) -- newest first
  local places = {} -- looked up, not searched: there may be a letter for every record
  for index, entry in ipairs(part) do
    local id = identity(entry)
    places[id] = index
    old = old + (is_aged(held, entry, id) and 1 or 0)
  end
  for number, letter in ipairs(letters) do
    local chosen, records, bytes = {}, {}, DEAD_LETTER_BASE + #held.key + #letter.reason
    if letter.wanted then
      for record_id in pairs(letter.wanted) do
        chosen[#chosen + 1] = places[record_id]
      end
      table.sort(chosen)
    end
    for index = 1, letter.wanted and #chosen or #part do
      local entry = part[letter.wanted and chosen[index] or index]
      if not is_aged(held, entry, identity(entry)) then
        records[#records + 1] = entry
        bytes = bytes + #entry
      end
    end
    if #records > 0 then
      local id = new_name() .. '-' .. number
      local facts = tag .. 'letter:' .. id
      rewrite(tag .. 'remains:' .. id, records, #records, DEAD_LETTER_TTL_MS)
      call('HSET', facts, 'key', held.key, 'reason', letter.reason, 'buried', now,
        'attempt', held.attempts + 1, 'digest', held.id, 'limits', held.own or letter.limits)
      call('PEXPIRE', facts, DEAD_LETTER_TTL_MS)
      call('ZADD', dead, now, id)
      weigh(id, bytes)
      try('HSET', sizes, 'most', letter.most)
      count('buried', #records)
      prune(letter.most)
    end
  end
  count('letters_dropped', let_go)
  return let_go, old
end

-- Remember what was delivered of the part that was taken: the records `wanted`, or (nil) all that are in no dead letter,
-- of which there is none of the whole part then.
local function remember_part(held, letters, taken, window, wanted)
  -- Needs    seen
  local lost = {}
  for _, letter in ipairs(letters) do
    for id in pairs(letter.wanted or {}) do
      lost[id] = true
    end
  end
  remember(held, taken, window, wanted, lost)
end

-- Close what most deliveries are: all of a digest was delivered, nothing has come since, and its hash has no fields but
-- those that all such timelines have. Answer nothing, having done nothing, if it is not so; `close` would do the same.
local function close_plain(key, token, digest_id, taken, delivered, cool)
  local meta, open = metas .. key, opens .. key
  local fields = try('HMGET', meta, 'id', 'token', 'end', 'iteration', 'last', 'cool', 'done')
  if fields[1] ~= digest_id or fields[2] ~= token then
    return
  end
  local iteration, known = whole(fields[4] or '0'), 2
  for index = 3, 7 do
    known = known + (fields[index] and 1 or 0)
  end
  if not iteration or known ~= call('HLEN', meta) or try('LLEN', logs .. key) ~= 0 or try('LLEN', open) ~= taken then
    return
  end
  count('digests', 1)
  count('delivered', delivered)
  leave(key)
  call('UNLINK', open, meta)
  call('HSET', meta, 'done', token .. ' ' .. digest_id .. ' closed  0', 'iteration', iteration + 1, 'last', now,
    'cool', now + cool)
  call('PEXPIRE', meta, cool + ECHO)
  return {'closed', '', 0, 0}
end

local function close(
  letters, window, wanted, key, token, digest_id, taken, delivered, aged, flags, cool, lease, max_size, ttl, hours
)
  taken, delivered, max_size, ttl = tonumber(taken), tonumber(delivered), tonumber(max_size), tonumber(ttl)
  if flags == '1' and aged == '0' and delivered > 0 and #letters == 0 then
    local closed = close_plain(key, token, digest_id, taken, delivered, tonumber(cool))
    if closed then
      return closed
    end
  end
  local is_counted = flags % 2 == 1
  local held, problem = load_all(key)
  if not held then
    return problem
  end
  local status, next_id, left = fenced(held, token, digest_id)
  if status ~= 'held' then
    return {status == 'released' and 'lost' or status, next_id, left} -- it comes again
  end
  local let_go, mutes_it, old = 0, tonumber(flags) >= 4, nil
  if #letters > 0 then
    local readable = try('ZCARD', tag .. 'dead')
    if type(readable) == 'table' then
      return readable.err
    end
    let_go, old = set_aside(held, letters, taken)
  end
  if window and delivered > 0 then
    remember_part(held, letters, taken, window, wanted)
  end
  if mutes_it then -- what came since is kept from the schedule
    -- Needs   mutes
    note_mute(key, NEVER_MS, true)
    need_mutes(held, held.logged > 0 or held.opened > taken)
  end
  count('digests', delivered > 0 and 1 or 0)
  count('delivered', delivered)
  count('aged', mutes_it and old or tonumber(aged)) -- who mutes has read but one part of what is set aside
  if held.opened > taken then
    status, next_id, left = 'part', new_name(), held.opened - taken
    call('LTRIM', opens .. key, taken, -1)
    held.id, held.attempts, held.lost, held.open_dropped, held.since = next_id, 0, 0, 0, 0
    held.frozen, held.error = nil, nil
    held.parted = (held.parted or is_counted) and '1' or nil
    touch(held, ttl) -- or the rest might end before its turn
    leave(key)
    call('ZADD', leased, now + lease, key)
  else
    status, next_id, left = 'closed', '', 0
    if is_counted or held.parted then
      held.iteration = held.iteration + 1
      held.last, held.cool = now, now + cool
    end
    end_delivery(held)
    settle(held, max_size, ttl, parse_hours(hours))
  end
  answer(held, token, digest_id, status, next_id, left)
  save(held, FIELDS)
  return {status, next_id, left, let_go}
end

-- Return the arguments of an item, its dead letters first: a table of them would take as long as two commands.
local function next_item()
  local at, letters, window, wanted = skip(12), {}, nil, nil
  for index = 1, next_number() do
    letters[index] = {
      reason = next_argument(), limits = next_argument(), most = next_number(), wanted = next_ids(),
    }
  end
  if math.floor(ARGV[at + 6] / 2) % 2 == 1 then
    window, wanted = next_number(), next_ids()
  end
  return letters, window, wanted, unpack(ARGV, at, at + 11)
end

return answer_each(next_item, close)

-- fencing: tell whose delivery it is, and what an earlier call for it was answered.
--
-- Needs    timelines

-- Return 'held' if token and digest id still name the delivery; else what its outcome was answered before, or 'lost'.
local function fenced(held, token, digest_id)
  if held.id and held.token == token and held.id == digest_id then
    return 'held'
  end
  if held.done then
    local done_token, done_id, status, next_id, left = string.match(held.done, '^(%S*) (%S*) (%S*) (%S*) (%d+)$')
    if done_token == token and done_id == digest_id then
      return status, next_id, tonumber(left)
    end
  end
  return 'lost', '', 0
end

-- Return a timeline, as `read` loads it, if token and digest id name its delivery; else nil, and what to answer: 1 if the
-- outcome was answered before, 0 if the lease is lost, or the text of an error; and the status of what was answered.
local function load_held(read, key, token, digest_id)
  local held, problem = read(key)
  if not held then
    return nil, problem
  end
  local status = fenced(held, token, digest_id)
  if status == 'held' then
    return held
  end
  return nil, status == 'lost' and 0 or 1, status
end

-- Note what the outcome of a delivery is answered, for a call that is repeated.
local function answer(held, token, digest_id, status, next_id, left)
  held.done = token .. ' ' .. digest_id .. ' ' .. status .. ' ' .. next_id .. ' ' .. left
end

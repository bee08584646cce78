-- release: give leases back without charging the attempt.
--
-- ARGV[3]  1 if the callbacks had started, so that the outcome is unknown
-- then     for each: key, token, digest id
-- Returns  for each: 1, 0 if the lease is lost, or the text of an error

call('PERSIST', layout)

local started = ARGV[3] == '1'

local function release(key, token, digest_id)
  local held, problem = load(key)
  if not held then
    return problem
  end
  local status = fenced(held, token, digest_id)
  if status ~= 'held' then
    return status == 'lost' and 0 or 1
  end
  held.attempts = math.max(0, held.attempts - 1)
  held.frozen = (held.frozen or started) and '1' or nil
  held.token = nil
  leave(key)
  place(key, now)
  answer(held, token, digest_id, 'closed', '', 0)
  save(held)
  return 1
end

local answers = {}
for cursor = 4, #ARGV, 3 do
  answers[#answers + 1] = release(ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2])
end
finish()
return answers

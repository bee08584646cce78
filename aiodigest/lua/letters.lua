-- letters: the ids of dead letters, the oldest first, but for those that reached their 30 days.
--
-- ARGV[3]  the first, from 0
-- ARGV[4]  how many at the most
-- Returns  ids

return call('ZRANGEBYSCORE', tag .. 'dead', '(' .. whole(now - LETTER_TTL), '+inf', 'LIMIT', ARGV[3], ARGV[4])

;; The tasklet of primes.c as text: counts the primes up to the number that it is given.
;;
;;   sublet burst examples/primes.wat --over numbers.jsonl
;;
;; Memory: output at 16, input at 64, and from 1024 on a byte for each number, 1 where it is composite.
(module
  (memory (export "memory") 16)
  (global $length (mut i32) (i32.const 0))

  ;; Where the input is to be put; nowhere if it is too long.
  (func (export "init") (param $size i32) (result i32)
    (select (i32.const 64) (i32.const -1) (i32.le_u (local.get $size) (i32.const 32))))

  ;; 0 is success.
  (func (export "run") (param $text i32) (param $size i32) (result i32)
    (local $end i32) (local $digit i32) (local $most i32) (local $count i32) (local $n i32) (local $m i64)
    (local $place i32)
    (if (i32.eqz (local.get $size)) (then (return (i32.const 1))))
    (local.set $end (i32.add (local.get $text) (local.get $size)))
    (loop $read
      (local.set $digit (i32.sub (i32.load8_u (local.get $text)) (i32.const 48)))
      (if (i32.gt_u (local.get $digit) (i32.const 9)) (then (return (i32.const 1))))
      (local.set $most (i32.add (i32.mul (local.get $most) (i32.const 10)) (local.get $digit)))
      (if (i32.gt_u (local.get $most) (i32.const 1000000)) (then (return (i32.const 2))))
      (local.set $text (i32.add (local.get $text) (i32.const 1)))
      (br_if $read (i32.lt_u (local.get $text) (local.get $end))))

    (local.set $n (i32.const 2))
    (block $sieved
      (loop $sieve
        (br_if $sieved (i32.gt_u (local.get $n) (local.get $most)))
        (if (i32.eqz (i32.load8_u offset=1024 (local.get $n)))
          (then
            (local.set $count (i32.add (local.get $count) (i32.const 1)))
            (local.set $m (i64.mul (i64.extend_i32_u (local.get $n)) (i64.extend_i32_u (local.get $n))))
            (block $marked
              (loop $mark
                (br_if $marked (i64.gt_u (local.get $m) (i64.extend_i32_u (local.get $most))))
                (i32.store8 offset=1024 (i32.wrap_i64 (local.get $m)) (i32.const 1))
                (local.set $m (i64.add (local.get $m) (i64.extend_i32_u (local.get $n))))
                (br $mark)))))
        (local.set $n (i32.add (local.get $n) (i32.const 1)))
        (br $sieve)))

    ;; the number of digits, then the digits from the last to the first
    (local.set $n (local.get $count))
    (local.set $place (i32.const 0))
    (loop $measure
      (local.set $place (i32.add (local.get $place) (i32.const 1)))
      (br_if $measure (local.tee $n (i32.div_u (local.get $n) (i32.const 10)))))
    (global.set $length (local.get $place))
    (loop $write
      (local.set $place (i32.sub (local.get $place) (i32.const 1)))
      (i32.store8 offset=16 (local.get $place) (i32.add (i32.const 48) (i32.rem_u (local.get $count) (i32.const 10))))
      (local.set $count (i32.div_u (local.get $count) (i32.const 10)))
      (br_if $write (local.get $place)))
    (i32.const 0))

  ;; Where the output lies: the address in the high 32 bits, the length in the low ones.
  (func (export "finalize") (result i64)
    (i64.or (i64.const 0x1000000000) (i64.extend_i32_u (global.get $length)))))

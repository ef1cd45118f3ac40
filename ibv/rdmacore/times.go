package rdmacore

import "time"

// ackTimeout is the code for a time to wait for acknowledgements: n means
// 4.096 us times two to the power of n (InfiniBand volume 1, section 9.7.6.1.3).
func ackTimeout(d time.Duration) int {
	n := 1
	for n < 31 && 4096*time.Nanosecond<<n < d {
		n++
	}
	return n
}

// rnrTimers are the times of the codes 1 to 31, in units of 10 us; code 0 stands
// for the longest (InfiniBand volume 1, section 9.7.5.2.8).
var rnrTimers = [...]int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
	3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152}

// rnrTimer is the code for the time that a peer waits when no receive is posted.
func rnrTimer(d time.Duration) int {
	for i, t := range rnrTimers {
		if time.Duration(t)*10*time.Microsecond >= d {
			return i + 1
		}
	}
	return 0
}

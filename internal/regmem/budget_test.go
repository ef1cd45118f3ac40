package regmem

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Charges of many users never go beyond the bound, and come back.
func TestChargeConcurrent(t *testing.T) {
	var b Budget
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			s := b.Share(1000, int64(7+g))
			for i := range heavy(20000) {
				if n := s.Raise(i % 40); n < min(s.Charged(), i%40) || b.Used() > 1000 {
					panic("beyond the bound")
				}
				s.Lower(i % 13)
			}
			s.Lower(-1)
		})
	}
	wg.Wait()
	require.Zero(t, b.Used())
	free := Share{}
	require.Equal(t, 100, free.Raise(100))
	free.Lower(0)
}

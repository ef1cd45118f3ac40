package verbstest

import (
	"errors"
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

// must fails the test on an error.
func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// mustBe fails the test unless err matches one of the errors wanted.
func mustBe(t testing.TB, what string, err error, want ...error) {
	t.Helper()
	if !slices.ContainsFunc(want, func(w error) bool { return errors.Is(err, w) }) {
		t.Fatalf("%s: error is %v, want a match of %v", what, err, want)
	}
}

// refused fails the test unless a post took nothing and failed for good, that
// is, not because the queue was full.
func refused(t testing.TB, what string, n int, err error) {
	t.Helper()
	if err == nil || n != 0 || errors.Is(err, ibv.ErrQueueFull) {
		t.Fatalf("%s: took %d, error %v; want it refused", what, n, err)
	}
}

// succeeded fails the test unless wc is that of the request id, done well.
func succeeded(t testing.TB, e *End, wc ibv.WC, id uint64, op ibv.WCOpcode) {
	t.Helper()
	if wc.Status != ibv.WCSuccess || wc.ID != id || wc.Op != op || wc.QPN != e.QP.QPN() {
		t.Fatalf("completion %+v (%v, %v); want success of %v %d on QP %d", wc, wc.Status, wc.Op, op, id, e.QP.QPN())
	}
}

// ended fails the test unless wc is that of request id with one of the statuses.
func ended(t testing.TB, e *End, wc ibv.WC, id uint64, status ...ibv.WCStatus) {
	t.Helper()
	if wc.ID != id || wc.QPN != e.QP.QPN() || !slices.Contains(status, wc.Status) {
		t.Fatalf("completion %+v (%v); want request %d on QP %d to end with one of %v",
			wc, wc.Status, id, e.QP.QPN(), status)
	}
}

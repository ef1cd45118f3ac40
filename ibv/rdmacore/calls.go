//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/ccall"
)

// What every message takes goes around cgo: it does not wait, and the scheduler
// should not be told that it might.

// pollCQ returns how many completions it has put into wcs, or a number below 0.
func pollCQ(c *C.struct_rn_cq, wcs []C.struct_rn_wc) int {
	p := C.struct_rn_poll{cq: c, wcs: unsafe.SliceData(wcs), n: C.int(len(wcs))}
	return int(ccall.Call(C.rn_poll_cq, unsafe.Pointer(&p)))
}

func armCQ(c *C.struct_rn_cq, solicitedOnly bool) error {
	a := C.struct_rn_arm{cq: c}
	if solicitedOnly {
		a.solicited = 1
	}
	return errno(C.int(ccall.Call(C.rn_arm_cq, unsafe.Pointer(&a))))
}

// takeEvent takes an event from the completion channel, or returns -EAGAIN.
func takeEvent(c *C.struct_rn_cq) C.int {
	return C.int(ccall.Call(C.rn_cq_event, unsafe.Pointer(c)))
}

// postSend returns how many are posted. sges has the elements of all wrs.
func postSend(q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	return post(C.rn_post_send, q, wrs, sges)
}

// postRecv is as postSend.
func postRecv(q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	return post(C.rn_post_recv, q, wrs, sges)
}

func post(fn unsafe.Pointer, q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	p := C.struct_rn_post{qp: q, wrs: unsafe.SliceData(wrs), sges: sges, n: C.int(len(wrs))}
	err := errno(C.int(ccall.Call(fn, unsafe.Pointer(&p))))
	return int(p.posted), err
}

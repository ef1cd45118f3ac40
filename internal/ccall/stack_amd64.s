//go:build linux && cgo && !race && !asan && !msan && !rdmanet_cgocall

#include "textflag.h"

// func call(fn, arg unsafe.Pointer, top uintptr) int32
//
// C keeps R12. The stack it is given is aligned to 16 bytes, as the ABI wants it.
TEXT ·call(SB), NOSPLIT, $0-28
	MOVQ	fn+0(FP), AX
	MOVQ	arg+8(FP), DI
	MOVQ	top+16(FP), CX
	MOVQ	SP, R12
	MOVQ	CX, SP
	CALL	AX
	MOVQ	R12, SP
	MOVL	AX, ret+24(FP)
	RET
